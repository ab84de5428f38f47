"""GPU memory that the ranks of one host share, and the counters by which they order copies
between them.
"""

from bmt_tp.peers.peer_counters import WRAP, PeerCounters, new_counters_file
from bmt_tp.peers.peer_memory import NoCopies, PeerMemory, SharedTensor, connected
from bmt_tp.peers.peer_watch import Awaited, PeerWatch

__all__ = [
    "WRAP",
    "Awaited",
    "NoCopies",
    "PeerCounters",
    "PeerMemory",
    "PeerWatch",
    "SharedTensor",
    "connected",
    "new_counters_file",
]
