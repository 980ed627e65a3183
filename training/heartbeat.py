"""How soon a process of a multi-worker run is taken for dead."""

from __future__ import annotations

# TensorFlow has no public name for these; by default ten seconds are all that a start may take.
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from training.cluster import WORKER, Cluster

MILLISECONDS = 1000


def configure_heartbeat(cluster: Cluster, timeout_s: int) -> None:
    """Sets the time-out of the service by which workers watch each other; before they meet.

    Args:
        cluster: The workers; the first one runs the service.
        timeout_s: Seconds without a sign of life after which a worker is lost.
    """
    job = coordination_config_pb2.CoordinatedJob(name=WORKER, num_tasks=len(cluster.workers))
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{WORKER}/replica:0/task:0",
        heartbeat_timeout_in_ms=timeout_s * MILLISECONDS,
        coordinated_jobs=[job],
    )
