"""The commands, one file each: fastcssl-train, -eval, -report, -doctor."""
