"""Images on disk -> task-split, checksummed shards and a manifest. The command is `fastcssl-prep`."""
