"""The two command lines that make namespaces.

Owns: bubblewrap's arguments, and the script that does the same with util-linux (``unshare``, ``mount``, ``pivot_root``, ``setpriv``).
Promises: the inner command starts with no capability and no way to get one, in a file system that is read-only but for the writable binds,
/tmp and /dev/shm, and cannot make further user namespaces (in them it could mount file systems that nothing limits).
Does not: start anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from envs.swe.layout import Layout

_TMP = ("/tmp", "/dev/shm")


def bwrap_command(program: str, layout: Layout, inner: Sequence[str], tmp_mib: int) -> list[str]:
    """``inner`` in bubblewrap."""
    command = [program, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    command += ["--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for place in _TMP:
        command += ["--size", str(tmp_mib << 20), "--tmpfs", place]
    for bind in layout.binds:
        command += ["--bind" if bind.writable else "--ro-bind", bind.source, bind.target]
    for target, name in layout.links:
        command += ["--symlink", target, name]
    for folder in layout.masks:
        command += ["--size", "4096", "--tmpfs", folder, "--remount-ro", folder]
    command += [
        "--remount-ro",
        "/dev",
        "--remount-ro",
        "/proc",
        "--remount-ro",
        "/",
    ]  # /proc: its switches ask for root's uid, not for rights
    for name, value in layout.environment:
        command += ["--setenv", name, value]
    return [*command, "--", *inner]


# $1: an empty folder. $2: KiB of /tmp. Then, up to a word "--": ro|rw source target, mask folder -, link target name.
_SCRIPT = r"""
set -eu
new=$1 tmp_kib=$2; shift 2
mount -t tmpfs -o size=4m,mode=755,nosuid,nodev tmpfs "$new"
cd "$new"
mkdir proc dev tmp dev/shm
mount -t proc -o nosuid,nodev,noexec proc proc
for name in null zero full random urandom tty; do : > dev/$name; mount --bind /dev/$name dev/$name; done
ln -s /proc/self/fd dev/fd; ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr
for place in tmp dev/shm; do mount -t tmpfs -o size=${tmp_kib}k,mode=1777,nosuid,nodev tmpfs $place; done
while [ "$1" != -- ]; do
  kind=$1 source=$2 target=$3; shift 3
  case $kind in
    link) ln -s "$source" ".$target" ;;
    mask) mount -t tmpfs -o size=4k,ro,nosuid,nodev tmpfs ".$source" ;;
    *)
      if [ -d "$source" ]; then [ -d ".$target" ] || mkdir -p ".$target"
      else mkdir -p "$(dirname ".$target")"; [ -e ".$target" ] || : > ".$target"; fi
      mount --bind "$source" ".$target"
      kept=$(findmnt -n -o VFS-OPTIONS --mountpoint "$new$target" | tail -n 1 | tr , '\n') || kept=
      kept=$(echo "$kept" | grep -Ex 'nodev|noexec|noatime|nodiratime|relatime' | tr '\n' ,) || kept=
      if [ "$kind" = ro ]; then kept=ro,$kept; fi
      mount -o "remount,bind,nosuid,${kept%,}" ".$target" ;;
  esac
done
shift
echo 0 > proc/sys/user/max_user_namespaces
mount -o remount,bind,ro,nosuid,nodev,noexec proc
mount -o remount,bind,ro,nosuid,nodev "$new"
pivot_root . .
umount -l .
cd /
hostname sandbox
exec setpriv --pdeathsig KILL --securebits +noroot,+noroot_locked,+no_setuid_fixup,+no_setuid_fixup_locked \
  --bounding-set -all --inh-caps -all --ambient-caps -all --no-new-privs -- "$@"
"""


def userns_command(program: str, layout: Layout, inner: Sequence[str], tmp_mib: int, root: str) -> list[str]:
    """``inner`` in namespaces made by util-linux; ``root`` is an empty folder to build the file system in."""
    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "--",
        program,
        "--user",
        "--map-root-user",
        "--mount",
        "--pid",
        "--net",
        "--ipc",
        "--uts",
        "--cgroup",
    ]
    command += ["--fork", "--kill-child=KILL", "--", "bash", "-c", _SCRIPT, "bash", root, str(tmp_mib << 10)]
    for bind in layout.binds:
        command += ["rw" if bind.writable else "ro", bind.source, bind.target]
    for target, name in layout.links:
        command += ["link", target, name]
    for folder in layout.masks:
        command += ["mask", folder, "-"]
    return [*command, "--", "/usr/bin/env", "-i", *(f"{name}={value}" for name, value in layout.environment), *inner]
