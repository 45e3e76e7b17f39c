"""How what a run keeps is written: values as JSON, and the states of random numbers."""
