"""This process's task, the membership of a cluster."""
