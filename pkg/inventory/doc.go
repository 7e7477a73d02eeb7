// Package inventory knows a node's GPUs and how they are: it asks NVIDIA's management library (NVML) for the cards,
// listens for their Xid errors, and probes them from time to time.
//
// Monitor does so for as long as a program runs and tells when something changed; List asks once. What is decided about
// a card (roster) is kept apart from asking the driver (driver) and from when to ask (reader): it needs no GPU, no
// library and no clock. NVML is loaded at run time, so a program that has this package runs on machines without it.
//
// A process can use one NVML library: the first one loaded answers every call, whatever is opened later.
package inventory
