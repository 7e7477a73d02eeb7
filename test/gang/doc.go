// Package gang tests gangs with a real kube-scheduler: all members of a gang run, or none. The long form
// (GPUSHARE_TEST_LONG) has more rounds, more gangs and more faults.
package gang
