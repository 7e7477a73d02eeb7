package framework

import (
	"fmt"
	"os"
	"testing"
)

// Shared is a cluster for several tests of a package, because a start takes seconds. Its tests use namespaces of their
// own and leave the cluster's programs running. It is not for tests that run in parallel.
type Shared struct {
	Options Options

	cluster *Cluster
}

// Start returns the cluster, which it starts at the first call. A cluster in which a test has failed is stopped, so that
// its logs end with that test; the next test gets another one.
func (s *Shared) Start(t testing.TB) *Cluster {
	t.Helper()
	if s.cluster == nil {
		s.cluster = startForTest(t, s.Options)
	}
	t.Cleanup(func() {
		if t.Failed() {
			s.cluster.endForTest(t)
			s.cluster = nil
		}
	})
	return s.cluster
}

// RunShared runs the tests of a package and then stops the shared clusters. It returns the exit status for TestMain.
func RunShared(m *testing.M, clusters ...*Shared) int {
	code := m.Run()
	for _, s := range clusters {
		if s.cluster == nil {
			continue
		}
		if err := s.cluster.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
		if err := os.RemoveAll(s.cluster.options.Dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	return code
}
