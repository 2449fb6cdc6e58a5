"""Channel selectors side by side: a score, a keep rule and a recovery, at a budget of reads charged to each alike."""
