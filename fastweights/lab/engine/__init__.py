"""What runs the experiments: plans, processes, results on disk, training steps and figures; knows no experiment."""
