package inspect

import (
	"strconv"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// The largest and the smallest width of a card's bar. A card gets the widest bar that fits beside the table, or else one
// character.
const (
	widestBar   = 10
	narrowedBar = 3
)

// cardBar returns the bar of a card. An unhealthy card is crossed out.
func (l Look) cardBar(card *Card, columns int) string {
	if !card.Healthy {
		return strings.Repeat("x", columns)
	}
	return l.bar(card.Allocated, card.Total, columns)
}

// bar returns a bar of the given width. It never looks empty while memory is allocated, nor full while memory is free.
func (l Look) bar(taken, total gpu.Memory, columns int) string {
	if columns < narrowedBar {
		return l.level(taken, total)
	}
	full, empty := "█", "░"
	if l.ASCII {
		full, empty = "#", "."
	}
	n := parts(taken, total, columns)
	return strings.Repeat(full, n) + strings.Repeat(empty, columns-n)
}

// level returns a bar of one character that grows upwards.
func (l Look) level(taken, total gpu.Memory) string {
	if l.ASCII {
		switch n := parts(taken, total, 10); n {
		case 0:
			return "."
		case 10:
			return "#"
		default:
			return strconv.Itoa(n)
		}
	}
	return string([]rune("·▁▂▃▄▅▆▇█")[parts(taken, total, 8)])
}

// parts rounds taken/total to a number of n parts. It returns 0 only if nothing is taken, and n only if all is.
func parts(taken, total gpu.Memory, n int) int {
	switch {
	case taken == 0:
		return 0
	case taken >= total:
		return n
	}
	rounded := int(float64(taken)/float64(total)*float64(n) + 0.5)
	return min(max(rounded, 1), n-1)
}

// cardStyle returns the color for a card's state.
func cardStyle(card *Card) style {
	switch {
	case !card.Healthy || card.Oversubscribed:
		return red
	case card.Allocated >= card.Total:
		return yellow
	case card.Allocated > 0:
		return green
	}
	return faint
}
