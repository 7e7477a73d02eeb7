// Package neighbours tries gpushare with components of other projects, which `make test-neighbours` builds or fetches. Without
// them its tests are skipped.
package neighbours
