"""The structures of cuda.h that test programs hand to the driver."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_void_p


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Prop(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("metadata", c_void_p),
        ("flags", c_ubyte * 8),
    ]


class PoolProps(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("security", c_void_p),
        ("most", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", c_ubyte * 54),
    ]


class Array(ctypes.Structure):
    _fields_ = [
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    ]


class Array2D(ctypes.Structure):
    _fields_ = [("width", c_size_t), ("height", c_size_t), ("format", c_int), ("channels", c_uint)]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


class AllocNode(ctypes.Structure):
    _fields_ = [
        ("pool", PoolProps),
        ("access", c_void_p),
        ("accesses", c_size_t),
        ("bytes", c_size_t),
        ("at", c_uint64),
    ]


class Instantiate(ctypes.Structure):
    _fields_ = [("flags", c_uint64), ("stream", c_void_p), ("node", c_void_p), ("result", c_int)]


class External(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle", c_void_p * 2),
        ("size", c_ulonglong),
        ("flags", c_uint),
        ("reserved", c_uint * 16),
    ]


class Tile(ctypes.Structure):
    _fields_ = [
        ("resource", c_int),
        ("array", c_void_p),
        ("subresource", c_int),
        ("where", c_uint64 * 4),
        ("operation", c_int),
        ("kind", c_int),
        ("handle", c_uint64),
        ("offset", c_uint64),
        ("devices", c_uint),
        ("flags", c_uint),
        ("reserved", c_uint * 2),
    ]


class IpcHandle(ctypes.Structure):
    _fields_ = [("raw", c_ubyte * 64)]
