package program

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/gpushare/gpushare/test/check"
)

func TestSetFlags(t *testing.T) {
	tests := map[string]struct {
		args        []string
		environment map[string]string
		want        string
		wantErr     string
	}{
		"neither leaves the default":   {want: "default"},
		"a variable sets its flag":     {environment: map[string]string{"NODE_NAME": "n1"}, want: "n1"},
		"the command line wins":        {args: []string{"--node-name=n2"}, environment: map[string]string{"NODE_NAME": "n1"}, want: "n2"},
		"one letter has no variable":   {environment: map[string]string{"V": "x"}, want: "default"},
		"a bad value names its source": {environment: map[string]string{"COUNT": "many"}, want: "default", wantErr: "environment variable COUNT"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
			got := flags.String("node-name", "default", "")
			flags.Int("count", 0, "")
			flags.IntP("v", "v", 0, "")
			check.Must(t, flags.Parse(test.args))
			err := SetFlags(flags, func(name string) (string, bool) {
				value, ok := test.environment[name]
				return value, ok
			})
			if (err == nil) != (test.wantErr == "") || err != nil && !strings.Contains(err.Error(), test.wantErr) {
				t.Errorf("SetFlags: %v, want %q", err, test.wantErr)
			}
			if *got != test.want {
				t.Errorf("--node-name is %q, want %q", *got, test.want)
			}
		})
	}
}
