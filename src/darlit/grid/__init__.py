"""The equal-budget grid: cells, plan, submission, results. Reads run folders and experiment files; never torch."""
