"""Workloads that come with the trainer; --workload=tower_train.workloads.NAME trains one."""
