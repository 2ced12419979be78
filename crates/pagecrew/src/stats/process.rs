//! What is known of a process besides what it counts itself.

use super::figures;

figures! {
    /// What a process has used, as the kernel says when it has ended.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct Usage: Run, none, [], "" {
        wall_ns key "wall_seconds": u64, Gauge Seconds, "Time from the start of the program to its end.";
        user_ns key "user_seconds": u64, Gauge Seconds, "CPU time of the program itself.";
        system_ns key "system_seconds": u64, Gauge Seconds, "CPU time of the kernel for the program.";
        peak_rss_bytes: u64, Gauge Bytes, "The most resident memory at a time.";
        minor_faults: u64, Gauge Count, "Page faults that needed no disk.";
        major_faults: u64, Gauge Count, "Page faults that waited for a disk.";
    }
}

figures! {
    /// Memory of a process on a NUMA node. Known on machines with several nodes.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct NodeMemory: Run, none, [], "nodes[]." {
        resident_bytes: u64, Gauge Bytes, "Memory of the whole process on the node.";
    }
}

figures! {
    /// Memory of a process on other NUMA nodes than it was asked for on. Known on machines with several nodes.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct Elsewhere: Run, none, [], "" {
        elsewhere_bytes: u64, Gauge Bytes, "Memory on another node than the one that its mapping prefers.";
    }
}
