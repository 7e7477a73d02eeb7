// Package gang shows groups of pods on a real kube-scheduler: all of a group's pods run, or none. Its long form
// (GPUSHARE_TEST_LONG) plays more rounds, more groups and more faults.
package gang
