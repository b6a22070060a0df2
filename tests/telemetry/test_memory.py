"""Memory metrics: of the process always, of devices where they report."""

from crl_jax.telemetry.exact import exact
from crl_jax.telemetry.joined import join_rows
from crl_jax.telemetry.memory import memory_metrics, of_devices


def test_the_fullest_device_counts_and_those_that_do_not_report_are_left_out() -> None:
    one = {"peak_bytes_in_use": 2 * 2**30, "bytes_in_use": 2**30, "bytes_limit": 4 * 2**30, "num_allocs": 7}
    two = {"peak_bytes_in_use": 3 * 2**30, "bytes_in_use": 2**29}
    assert of_devices([one, None, two, {}]) == {"device/peak_gib": 3.0, "device/in_use_gib": 1.0, "device/limit_gib": 4.0}
    assert of_devices([None, None]) == {}
    assert join_rows([{"device/peak_gib": 2.0, "profile/captures": 1}, {"device/peak_gib": 3.0}]) == {
        "device/peak_gib": 3.0,
        "profile/captures": 1,
    }


def test_a_process_on_a_cpu_reports_its_own_peak() -> None:
    found = memory_metrics()
    assert found["host/peak_rss_gib"] > 0.01
    assert exact(found | {"device/peak_gib": 1.0, "profile/captures": 1}) == {}, "no seed fixes these"
