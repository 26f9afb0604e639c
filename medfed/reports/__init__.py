"""What people read: tables, pictures and files of cohorts, runs and comparisons of runs."""
