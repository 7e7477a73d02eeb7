// Package upgrade runs two versions of the extender in one cluster: the present one, and the earlier one in bin/former that `make test-upgrade`
// builds from git's history. Without it the tests are skipped.
package upgrade
