"""A Ray cluster of two nodes on the loopback device, until its standard input closes: prints its address when both are there.

Run by tests and acceptance scripts in a process of its own: `python two_nodes.py`, with RAY_AUTH_MODE and RAY_AUTH_TOKEN set.
Node one offers `learn`, node two `collect`.
"""

from __future__ import annotations

import os
import sys

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

from ray.cluster_utils import Cluster

LOCAL = {"node_ip_address": "127.0.0.1", "include_dashboard": False}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"learn": 2}, **LOCAL})
    try:
        cluster.add_node(num_cpus=2, resources={"collect": 2}, **LOCAL)
        cluster.wait_for_nodes()
        print(f"address {cluster.address}", flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
