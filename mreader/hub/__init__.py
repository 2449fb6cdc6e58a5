"""The Hugging Face Hub: publishing an augmented checkpoint, and reading a source from it.

Both sides end in one line of cause and one of remedy. What the Hub refuses (401, 403, 404) ends at once; what may pass
(429, 5xx, a dropped connection) is tried a few times; after that the same command run again takes up where it stopped.
"""

from mreader.hub.fetch import RemoteRepo, fetch_snapshot, remote_headers
from mreader.hub.push import PushResult, push_to_hub

__all__ = ["PushResult", "RemoteRepo", "fetch_snapshot", "push_to_hub", "remote_headers"]
