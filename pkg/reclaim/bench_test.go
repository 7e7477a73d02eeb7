package reclaim

import (
	"testing"
)

// BenchmarkChoose makes room for pods of 4 on 5,000 nodes with 8 cards of 8, which pods of 2 fill.
func BenchmarkChoose(b *testing.B) {
	const nodes = 5000
	s := newScene(make([]int, nodes)...)
	for i := range nodes {
		s.Cards[node(i)] = newScene(8).Cards[node(0)]
		for card := range 8 {
			for range 4 {
				s.has("bob", [3]int{i, card, 2})
			}
		}
	}
	s.excess("bob", nodes*8*4)
	s.wants(4, 1)
	for range 255 {
		s.Items = append(s.Items, s.Items[0])
	}
	for b.Loop() {
		b.StopTimer()
		cluster := s.copied()
		b.StartTimer()
		if plan, ok := Choose(s.Need, cluster); !ok || len(plan.Served) != 256 {
			b.Fatalf("%d are served", len(plan.Served))
		}
	}
}
