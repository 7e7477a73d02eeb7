package inspect

import (
	"strconv"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// The widths of a card's bar. The largest that fits beside the table is taken; where none does, one character a card.
const (
	widestBar   = 10
	narrowedBar = 3
)

// cardBar draws a card: crossed out where it can't be used.
func (l Look) cardBar(card *Card, columns int) string {
	if !card.Healthy {
		return strings.Repeat("x", columns)
	}
	return l.bar(card.Allocated, card.Total, columns)
}

// bar draws how much is taken of a card, in so many columns. Whatever is taken shows, and so does whatever is left.
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

// level is a bar of one character that grows upwards.
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

// parts rounds taken/total to a number of n parts, of which 0 means nothing and n all.
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

// cardStyle tells a card's state by its colour.
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
