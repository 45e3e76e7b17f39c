"""What steps of a run do, as they are watched: marks in time, and what is made of them."""
