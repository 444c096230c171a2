#!/usr/bin/env python3
"""live-rollbacks.py DEVICE CONTROL SNAPSHOT COUNT: writes to an attached device and rolls its volume back to SNAPSHOT
under it, COUNT times, by the control socket CONTROL. After each answer all of the device has to be as in the snapshot,
read directly, by another open of it, and through its cache. Prints how long the rollbacks took."""
import json
import mmap
import os
import socket
import sys
import threading
import time

device, control, snapshot, count = *sys.argv[1:4], int(sys.argv[4])
SIZE, PAGE = 1 << 20, 4096


def read(file, memory):
    """Reads the first MiB into aligned memory."""
    assert os.preadv(file, [memory], 0) == SIZE
    return bytes(memory)


direct = os.open(device, os.O_RDWR | os.O_DIRECT)
memory, page = mmap.mmap(-1, SIZE), mmap.mmap(-1, PAGE)
clean = read(direct, memory)
cached = open(device, "rb", buffering=0)
peer = socket.socket(socket.AF_UNIX)
peer.connect(control)
answers, times, ends = peer.makefile(), [], False


def keep_reading():
    """Reads while requests are exchanged: each word is as in the snapshot or of a round."""
    file, own = os.open(device, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, SIZE)
    while not ends:
        found = read(file, own)
        for at in range(0, SIZE, PAGE):
            word = found[at:at + 8]
            if word != clean[at:at + 8] and not 0 < int.from_bytes(word, "little") <= count:
                print(f"a reader found another byte at {at}", file=sys.stderr)
                os._exit(1)


reader = threading.Thread(target=keep_reading)
reader.start()
for number in range(1, count + 1):
    page[:] = number.to_bytes(8, "little") * (PAGE // 8)
    for at in range(number % 5 * PAGE, SIZE, 50 * PAGE):
        os.pwritev(direct, [page], at)
    request = {"jsonrpc": "2.0", "id": number, "method": "rollback", "params": {"snapshot": snapshot, "live": True}}
    begin = time.monotonic()
    peer.sendall(json.dumps(request).encode() + b"\n")
    answer = json.loads(answers.readline())
    while "method" in answer:  # A notification of progress.
        answer = json.loads(answers.readline())
    times.append(time.monotonic() - begin)
    if "result" not in answer:
        sys.exit(f"round {number}: {answer}")
    if read(direct, memory) != clean:
        sys.exit(f"round {number}: bytes of before the rollback, read directly")
    if number % 10 == 0 and cached.seek(0) == 0 and cached.read(SIZE) != clean:
        sys.exit(f"round {number}: bytes of before the rollback in the cache of the device")
ends = True
reader.join()
times.sort()
print(f"{count} live rollbacks: median {times[count // 2] * 1e3:.1f} ms, p99 {times[count * 99 // 100] * 1e3:.1f} ms")
