"""verl_ray: the library of a distributed RLHF service on Ray. It imports no role and no
driver.
"""

__version__ = "0.1.0"
