package inspect

import (
	"bytes"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

func TestTableOnTerminal(t *testing.T) {
	want := `
<B>NAME  IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(GiB)<0>
<R>n     10.0.0.1   9/16                   0/16                   9/32<0>

<B>NAME  IPADDRESS  GPU0(Allocated/Total)  GPU Memory(GiB)<0>
o     10.0.0.2   0/16                   0/16
------------------------------------------------------------------------------
`
	objects := failing(t)
	objects.Nodes = append(objects.Nodes, inventoryNode(t, "o", "10.0.0.2", gpu.GiB, t4(0, 16)).Node)
	colors := strings.NewReplacer("<B>", "\x1b[1m", "<R>", "\x1b[31m", "<0>", "\x1b[0m")
	var out bytes.Buffer
	writeTable(&out, Build(objects), format{look: look{color: true}})
	got, _, _ := strings.Cut(out.String(), "Largest Free Piece")
	check.Equal(t, "output", colors.Replace(strings.TrimPrefix(want, "\n")), got)
}

func TestLook(t *testing.T) {
	t.Setenv("NO_COLOR", "1")
	for color, want := range map[string]look{
		colorAuto: {}, colorNever: {}, // A pipe gets plain text.
		colorAlways: {color: true},
	} {
		if got := lookFor(&bytes.Buffer{}, color); got != want {
			t.Errorf("%s: %+v, want %+v", color, got, want)
		}
	}
}
