// Package inventory reads the inventory of a node: its cards and their health. It lists the cards through NVIDIA's
// management library (NVML), receives their Xid errors as NVML events, and probes each card at an interval.
//
// Monitor runs as long as the program and publishes each change. List reads the cards once. The package has three layers:
// roster decides which cards are healthy, driver calls NVML, and reader schedules the calls. The roster needs no GPU, no
// library and no clock. NVML is loaded at run time, so a program that imports this package also runs on a machine without
// the library.
//
// A process can use only one NVML library: the first that it loads answers every call, even if another one is opened later.
package inventory
