"""What the experiments train: data and models of the tasks, one file each."""
