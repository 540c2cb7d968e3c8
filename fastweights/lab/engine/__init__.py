"""What runs the experiments: plans, processes, results on disk, training, claims, figures; knows no experiment."""
