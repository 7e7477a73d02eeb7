package inspect

import (
	"strings"
	"testing"

	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/gpushare/gpushare/test/check"
)

func TestCompletion(t *testing.T) {
	api := newFakeAPI(t, twoNodes(t))
	// The kubeconfig comes from the environment, since on the command line it would be another word.
	t.Setenv("KUBECONFIG", writeKubeconfig(t, api.URL))
	complete := func(words ...string) string {
		out := newOutput()
		cmd := NewCommand(genericiooptions.IOStreams{In: strings.NewReader(""), Out: out, ErrOut: newOutput()}, "v1.2.3")
		cmd.SetArgs(CompletionArgs(words))
		check.NoError(t, cmd.ExecuteContext(t.Context()))
		return out.String()
	}
	for name, test := range map[string]struct {
		words []string
		want  string
	}{
		"nodes that share GPU memory": {[]string{""}, "cn-beijing.i-2ze\ncn-shanghai.i-uf61h64\n:4\n"},
		"nodes not named before":      {[]string{"-d", "cn-beijing.i-2ze", ""}, "cn-shanghai.i-uf61h64\n:4\n"},
		"formats":                     {[]string{"-o", ""}, "wide\njson\nyaml\nname\n:4\n"},
		"colors":                      {[]string{"--color", ""}, "auto\nalways\nnever\n:4\n"},
	} {
		check.Equal(t, name, test.want, complete(test.words...))
	}
	api.Close()
	if got := complete(""); got != ":4\n" {
		t.Errorf("with an unreachable API server: %q", got)
	}
}
