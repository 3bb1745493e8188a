"""What watches a run: speed, pathway health, non-finite values, preemption, progress, the record."""
