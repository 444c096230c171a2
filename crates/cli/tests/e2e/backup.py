# What docs/nbd.md shows, with its names from the environment: copies what has changed into an image.
import os

h.add_meta_context(os.environ["CONTEXT"])
h.connect_uri(os.environ["URI"])
def copy(context, at, extents, error):
    for length, dirty in zip(extents[::2], extents[1::2]):
        for start in range(at, at + length if dirty else at, 1 << 20):
            image.seek(start)
            image.write(h.pread(min(1 << 20, at + length - start), start))
        at += length
    global asked
    asked = at
asked, size = 0, h.get_size()
with open(os.environ["IMAGE"], "r+b") as image:
    image.truncate(size)
    while asked < size:
        found = []
        h.block_status(min(size - asked, 1 << 30), asked, lambda *of: found.append(of))
        for of in found:
            copy(*of)
