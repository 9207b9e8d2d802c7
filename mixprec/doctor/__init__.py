"""``python -m mixprec doctor``: what this machine gains, what is broken, what a script gets wrong.

script.py and rules.py read scripts, the other modules look at the machine. Nothing here is imported
by the rest of mixprec.
"""
