"""Models of Hugging Face: their computation, and reading and writing them.

It may import `data`, and what lies below it.
"""

import os

# Otherwise transformers takes kernels of the hub for installed ones: it would fetch
# code, and run it, where the package `kernels` is installed. It reads this once, as it
# is imported.
os.environ.setdefault("USE_HUB_KERNELS", "NO")
