"""Who takes part: the table and the pictures of a cohort before training."""
