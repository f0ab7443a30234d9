"""A far side that greets as the receiver does, and then lies.

What it answers when something is asked is for each test to put in the place of `{answer}`:
statements that `say` frames.
"""

LYING_RECEIVER = """
import os
from ntt_backup.wire.framing import *
from ntt_backup.wire.write_messages import *
from ntt_backup.wire.read_messages import *
from ntt_backup.wire import file_messages
inbox = Inbox(file_messages.TO_RECEIVER)
words = b"version=0 python=3.11.0 hash=blake3 codec=zlib "
words += b"allow=list,get,verify,replace,dump,snapshot"
os.write(1, b"\\nNTT-RECEIVE 1 " + words + b"\\n")
def say(frame): os.write(1, frame)
A, B, C = bytes(32), b"\\x01" * 32, b"\\x02" * 32
while True:
    count = os.readv(0, [inbox.space()])
    if not count: break
    inbox.filled(count)
    while (found := inbox.next()) is not None:
        if found[0] == HELLO: say(fields(READY, {"placed": 1}))
        if found[0] in (*range(LIST, GET + 1), FILES, READ, REMOVE, FILE_END, PUBLISH):
            {answer}
"""
