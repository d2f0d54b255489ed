"""The kernel drops the first packets of the addresses that the filter names, and of no others."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from observe.address_filter import FILTERED_MOST, attach, detach, program, source_of

SHORT_S = 0.3
"""A dropped client tries again after 1 s."""


@contextlib.contextmanager
def listening(family: socket.AddressFamily = socket.AF_INET) -> Iterator[socket.socket]:
    if family is socket.AF_INET:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            yield sock
    else:
        with socket.create_server(("::", 0), family=family, dualstack_ipv6=True) as sock:
            yield sock


def connects(to: socket.socket, source: str) -> bool:
    client = socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET)
    with client:
        client.settimeout(SHORT_S)
        client.bind((source, 0))
        try:
            client.connect(("::1" if ":" in source else "127.0.0.1", to.getsockname()[1]))
        except TimeoutError:
            return False
        return True


def test_new_connections_of_named_addresses_are_dropped():
    with listening() as sock:
        attach(sock, ["10.0.0.1", "127.0.0.9", "::", "no address"])
        assert not connects(sock, "127.0.0.9")
        assert connects(sock, "127.0.0.8")
        attach(sock, ["127.0.0.8"])
        assert connects(sock, "127.0.0.9")
        assert not connects(sock, "127.0.0.8")
        detach(sock)
        assert connects(sock, "127.0.0.8")
        with pytest.raises(FileNotFoundError):
            detach(sock)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_socket_for_both_families_drops_both():
    with listening(socket.AF_INET6) as sock:
        attach(sock, ["127.0.0.9", "fd00::", "::1"])
        assert not connects(sock, "::1")
        assert not connects(sock, "127.0.0.9")
        assert connects(sock, "127.0.0.8")
        neighbours = ["8000::1", "0:1::1", "::1:0:0:1", "::1:1", "::2"]
        attach(sock, ["127.0.0.9", "fd00::", *neighbours])
        assert connects(sock, "::1"), "a part of its address is another's"
        attach(sock, [*neighbours, "::1"])
        assert not connects(sock, "::1")


def test_an_open_connection_goes_on():
    with listening() as sock, socket.socket() as client:
        client.bind(("127.0.0.9", 0))
        client.connect(sock.getsockname())
        attach(sock, ["127.0.0.9"])
        client.sendall(b"before it was accepted")
        with sock.accept()[0] as served:
            assert served.recv(100) == b"before it was accepted"
            client.sendall(b"and after")
            served.sendall(b"answer")
            assert served.recv(100) == b"and after"
        assert client.recv(100) == b"answer"


@pytest.mark.parametrize("form", ["10.0.{}.{}", "fd00:{}:{}::"])
def test_as_many_addresses_as_it_may_have_fit_the_kernel(form):
    many = [form.format(number // 250, number % 250) for number in range(FILTERED_MOST - 1)]
    with listening() as sock:
        attach(sock, [*many, "127.0.0.9"])
        assert not connects(sock, "127.0.0.9")
        assert connects(sock, "127.0.0.8")


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:03:4:5:6", "2001:db8:1:2:3:4:5:6"),
        ("fe80::1%eth0", "fe80::1"),
        ("", ""),
        ("no:address", "no:address"),
    ],
)
def test_what_counts_as_one_client(address, source):
    assert source_of(address) == source


def test_text_that_is_no_address_is_in_no_filter():
    assert program(["", "no address"]) == program([])
