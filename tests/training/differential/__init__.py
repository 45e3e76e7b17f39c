"""A generator of training loops, each run plain and offloaded: every difference is shrunk to a program.

- `programs`: a program as data, and its text in Python, which is what runs.
- `models`, `optimizers`, `hooks`, `loops`: the tables of what a program may consist of.
- `trial`: what its text calls; `observing`: what is noted and compared.
- `running`: a program run plain and offloaded, and the difference between the two.
- `strategies`: programs drawn by Hypothesis; `features`: what is switched off, and why.
"""
