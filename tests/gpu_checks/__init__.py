"""The sections of gpu_check, each in a process of its own. A section that needs a GPU and has none says so."""
