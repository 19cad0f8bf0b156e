"""How fast an engine is: times, what a step moves at least, what the card can do, others beside it, the report."""
