"""Print the Triton to install beside the torch that is there: torch's own, where it asks for one.

The CPU builds of torch ask for none; beside them stands the release that the kernels are measured
with.
"""

from importlib.metadata import requires

if not any(requirement.startswith("triton") for requirement in requires("torch") or ()):
    print("triton==3.6.0")
