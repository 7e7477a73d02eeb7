// Package usage measures how much memory of each card each container uses. NVML reports processes by card; the kernel's names of
// their cgroups show the containers (cgroup.go); the device plugin knows the containers' pods and requests. Where the
// driver counts the memory of cgroups itself, that figure is read too (cgroupfs.go).
//
// Meter reads, and build makes a report of what it has read, without side effects (report.go).
package usage
