"""``python -m sandboxgym.bench NAME``."""

import sys

from sandboxgym.cli.passing import bench_main

sys.exit(bench_main(sys.argv[1:]))
