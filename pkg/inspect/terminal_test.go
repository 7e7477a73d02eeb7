package inspect

import (
	"bytes"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

func TestTableOnTerminal(t *testing.T) {
	tests := map[string]struct {
		look look
		want string
	}{
		"bars and the largest free piece are right of the other columns": {look{bars: true}, `
NAME  IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(GiB)  LARGEST FREE(GiB)  GPU0        GPU1
n     10.0.0.1   9/16                   0/16                   9/32             7                  ######....  xxxxxxxxxx

NAME  IPADDRESS  GPU0(Allocated/Total)  GPU Memory(GiB)  LARGEST FREE(GiB)  GPU0
o     10.0.0.2   0/16                   0/16             16                 ..........
------------------------------------------------------------------------------------------------------------------------
`},
		"headers are shortened if that makes room": {look{bars: true, width: 88}, `
NAME  IPADDRESS  GPU0  GPU1  GPU Memory(GiB)  LARGEST FREE(GiB)  GPU0        GPU1
n     10.0.0.1   9/16  0/16  9/32             7                  ######....  xxxxxxxxxx

NAME  IPADDRESS  GPU0  GPU Memory(GiB)  LARGEST FREE(GiB)  GPU0
o     10.0.0.2   0/16  0/16             16                 ..........
---------------------------------------------------------------------------------------
`},
		"without room there are no bars": {look{bars: true, width: 80}, `
NAME  IPADDRESS  GPU0  GPU1  GPU Memory(GiB)  LARGEST FREE(GiB)
n     10.0.0.1   9/16  0/16  9/32             7

NAME  IPADDRESS  GPU0  GPU Memory(GiB)  LARGEST FREE(GiB)
o     10.0.0.2   0/16  0/16             16
---------------------------------------------------------------
`},
		"colors mark nodes with problems": {look{color: true}, `
<B>NAME  IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(GiB)<0>
<R>n     10.0.0.1   9/16                   0/16                   9/32<0>

<B>NAME  IPADDRESS  GPU0(Allocated/Total)  GPU Memory(GiB)<0>
o     10.0.0.2   0/16                   0/16
------------------------------------------------------------------------------
`},
	}
	objects := failing(t)
	objects.Nodes = append(objects.Nodes, inventoryNode(t, "o", "10.0.0.2", gpu.GiB, t4(0, 16)).Node)
	colors := strings.NewReplacer("<B>", "\x1b[1m", "<R>", "\x1b[31m", "<0>", "\x1b[0m")
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			writeTable(&out, Build(objects), format{look: test.look})
			got, _, _ := strings.Cut(out.String(), "Largest Free Piece")
			check.Equal(t, "output", colors.Replace(strings.TrimPrefix(test.want, "\n")), got)
		})
	}
}

func TestDetailsOnTerminal(t *testing.T) {
	var out bytes.Buffer
	writeDetails(&out, Build(failing(t)), format{look: look{bars: true}})
	want := `
GPU   UUID   MODEL     NUMA  ALLOCATED/TOTAL                        HEALTH
GPU0  GPU-0  Tesla T4  1     9/16             ###########.........  healthy
GPU1  GPU-1  Tesla T4  -     0/16             xxxxxxxxxxxxxxxxxxxx  unhealthy: Xid 79
`
	if !strings.Contains(out.String(), want) {
		t.Errorf("no cards in:\n%s", out.String())
	}
}

func TestLook(t *testing.T) {
	t.Setenv("NO_COLOR", "1")
	for color, want := range map[string]look{
		colorAuto: {}, colorNever: {}, // A pipe gets plain text.
		colorAlways: {color: true, bars: true},
	} {
		if got := lookFor(&bytes.Buffer{}, color); got != want {
			t.Errorf("%s: %+v, want %+v", color, got, want)
		}
	}
}

// TestBar checks that a bar is empty only if nothing is allocated, and full only if nothing is free.
func TestBar(t *testing.T) {
	for _, test := range []struct {
		allocated, total gpu.Memory
		want             string
	}{
		{0, 1000, ".........."}, {1, 1000, "#........."}, {500, 1000, "#####....."}, {999, 1000, "#########."},
		{1000, 1000, "##########"}, {2000, 1000, "##########"}, {0, 0, ".........."},
	} {
		if got := bar(test.allocated, test.total, 10); got != test.want {
			t.Errorf("%d of %d: %s, want %s", test.allocated, test.total, got, test.want)
		}
	}
}
