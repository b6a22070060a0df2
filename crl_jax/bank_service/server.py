"""The bank's gRPC server: its port, its services, its end.

Owns: the socket, TLS, keepalive, health and reflection. Promises: without a token only this machine is listened to; two servers cannot
have one port; a message that is too large is answered RESOURCE_EXHAUSTED. Does not: know what calls mean (``service``) or the bank's file
(``serve_bank``).
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from crl_jax.errors import MissingPackage
from crl_jax.serving.access import AddressError, check_open_to

try:
    import grpc
    from google.protobuf.message_factory import GetMessageClass
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

    from crl_jax.bank_service import bank_pb2 as pb
except ModuleNotFoundError as missing:
    raise MissingPackage(f"the bank's service needs gRPC ({missing}): pip install -e '.[bank]'") from missing

from crl_jax.bank_service.door import Doorkeeper, Gate
from crl_jax.bank_service.limits import Limits
from crl_jax.bank_service.service import BankService

SERVICE = pb.DESCRIPTOR.services_by_name["Bank"]
_SLACK = 2**20  # gRPC itself refuses larger messages, with less to say


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM texts: the server's certificate (with its chain) and key."""

    certificate: bytes
    key: bytes


class BankServer:
    """A server that has its port and does not answer yet. Make it on the event loop that it runs on.

    Raises AccessError for a host other than this machine without a token, AddressError for an address that cannot be listened on.
    """

    def __init__(self, host: str, port: int, *, token: str, tls: Tls | None, limits: Limits) -> None:
        check_open_to(host, token)
        self.limits = limits
        self.counts: Counter[str] = Counter()
        self._server = grpc.aio.server(
            interceptors=[Doorkeeper(token, self.counts)],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limits.message_bytes + _SLACK),
                ("grpc.max_send_message_length", limits.message_bytes + _SLACK),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ],
        )
        address = f"[{host}]:{port}" if ":" in host.strip("[]") and not host.startswith("[") else f"{host}:{port}"
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([(tls.key, tls.certificate)]))
        except RuntimeError as error:
            fix = "it is in use or not this machine's, or the certificate and key do not belong together"
            raise AddressError(f"cannot listen on {address}: {fix}; choose another --port or --host") from error
        self._health: Any = getattr(health, "aio").HealthServicer()  # noqa: B009 (its types do not know it)

    async def start(self, service: BankService, log: Callable[[str], None] = lambda text: print(text, file=sys.stderr)) -> Gate:
        """Answer calls from now on."""
        gate = Gate(self.limits, self.counts, log)
        service.door = gate.stats
        handlers: dict[str, Any] = {
            method.name: grpc.unary_unary_rpc_method_handler(
                gate.guard(method.name, getattr(service, method.name)),
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
            for method in SERVICE.methods
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._server.start()
        for name in ("", SERVICE.full_name):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return gate

    async def stop(self, grace_s: float) -> None:
        """No new calls from now on; those in flight have ``grace_s``."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
