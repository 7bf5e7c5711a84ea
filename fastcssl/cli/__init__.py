"""The commands, one file a verb: fastcssl-train."""
