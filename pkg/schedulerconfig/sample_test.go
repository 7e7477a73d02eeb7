package schedulerconfig

import "testing"

func TestSampleSize(t *testing.T) {
	for _, test := range []struct{ percentage, nodes, want int }{
		{10, 50, 100}, {10, 1000, 100}, {10, 5000, 500}, {100, 5000, 5000}, {0, 1000, 420}, {0, 5000, 500}, {0, 15000, 750},
	} {
		if got := SampleSize(test.percentage, test.nodes); got != test.want {
			t.Errorf("%d%% of %d nodes: %d, want %d", test.percentage, test.nodes, got, test.want)
		}
	}
}
