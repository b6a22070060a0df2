"""The generated module belongs to the protocol file, and the protocol to the service and the records."""

import dataclasses
import pathlib
import subprocess
import sys

import pytest
import service_toys  # noqa: F401 (skips without the packages)

from crl_jax.bank_service import bank_pb2 as pb
from crl_jax.bank_service.client import RemoteBank
from crl_jax.bank_service.service import BankService
from crl_jax.experience.buffer import Sample
from crl_jax.records import Episode, Experience, Generation, OpKind, Turn, Usage, Verdict

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROTO = "crl_jax/bank_service/bank.proto"


def test_the_generated_module_is_that_of_the_proto_file(tmp_path):
    pytest.importorskip("grpc_tools", reason="compiles bank.proto again: pip install grpcio-tools")
    from google.protobuf import descriptor_pb2

    out = tmp_path / "set"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", f"--descriptor_set_out={out}", PROTO], cwd=ROOT, check=True, timeout=60
    )
    (compiled,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    for message in compiled.message_type:
        for field in [*message.field, *(f for nested in message.nested_type for f in nested.field)]:
            field.ClearField("json_name")  # the generated module leaves it out
    assert compiled == descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)


def test_every_message_and_method_of_the_proto_file_is_in_the_generated_module():
    lines = [line.split() for line in (ROOT / PROTO).read_text(encoding="utf-8").splitlines()]
    assert {words[1] for words in lines if words[:1] == ["message"]} == set(pb.DESCRIPTOR.message_types_by_name)
    methods = {words[1].partition("(")[0] for words in lines if words[:1] == ["rpc"]}
    assert methods == {m.name for m in pb.DESCRIPTOR.services_by_name["Bank"].methods}
    assert all(callable(getattr(BankService, name)) for name in methods)


@pytest.mark.parametrize(
    ("record", "message", "differs"),
    [
        (Experience, pb.Experience, {}),
        (Usage, pb.Usage, {}),
        (Generation, pb.Generation, {}),
        (Turn, pb.Turn, {"span": {"span_start", "span_end", "logps"}}),
        (Episode, pb.Episode, {"log": set()}),
        (Verdict, pb.Verdict, {}),
    ],
)
def test_no_field_of_a_record_is_left_out(record, message, differs):
    fields = {f.name for f in dataclasses.fields(record)}
    wanted = (fields - set(differs)).union(*differs.values())
    assert set(message.DESCRIPTOR.fields_by_name) == wanted


def test_the_numbers_of_a_sample_are_numbers():
    assert all(Sample.__annotations__[name].__forward_arg__ in ("int", "float") for name in Sample._fields[1:])


def test_the_kinds_of_operations_are_in_the_protocols_comment():
    text = (ROOT / PROTO).read_text(encoding="utf-8")
    assert all(kind.value in text for kind in OpKind if kind is not OpKind.NOOP)


def test_the_client_has_the_methods_a_run_uses():
    used = ("retrieve", "ask", "submit", "observe", "on_step", "drain", "pop_batch", "checkpoint", "restore", "restart", "stats", "merge")
    assert all(callable(getattr(RemoteBank, name)) for name in used)
