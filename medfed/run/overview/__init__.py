"""Which clients take part: the table and the pictures of a cohort before training."""
