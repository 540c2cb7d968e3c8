"""What only a GPU can check or time: jobs, the calls that run them, and a table of aims (`__main__.py` says how)."""
