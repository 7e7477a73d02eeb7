package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/gpushare/gpushare/cmd/internal/program"
	"github.com/gpushare/gpushare/cmd/internal/program/programtest"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/test/check"
)

func TestBadFlags(t *testing.T) {
	for name, test := range map[string]struct {
		args        []string
		environment map[string]string
		want        string
	}{
		"no node name":              {nil, nil, "--node-name (or NODE_NAME) is missing"},
		"unknown flag":              {[]string{"--nope"}, nil, "unknown flag: --nope"},
		"an argument":               {[]string{"stray"}, nil, "unknown command"},
		"an invalid unit":           {[]string{"--node-name=a", "--memory-unit=GB"}, nil, `--memory-unit: memory unit "GB"`},
		"unknown visible devices":   {[]string{"--node-name=a", "--visible-devices=name"}, nil, `"name" is neither uuid nor index`},
		"unknown device strategy":   {[]string{"--node-name=a", "--device-list-strategy=mount"}, nil, `"mount" is neither envvar nor cdi-cri`},
		"a variable's bad strategy": {nil, map[string]string{"NODE_NAME": "a", "DEVICE_LIST_STRATEGY": "cdi"}, `"cdi" is neither`},
		"a relative directory":      {[]string{"--node-name=a", "--device-plugin-dir=x"}, nil, `"x" is not an absolute path`},
		"a relative socket":         {[]string{"--node-name=a", "--pod-resources-socket=x"}, nil, `"x" is not an absolute path`},
		"no quiet period":           {[]string{"--node-name=a", "--health-quiet-period=0s"}, nil, "--health-quiet-period: must be positive, got 0s"},
		"a duration without unit":   {nil, map[string]string{"NODE_NAME": "a", "HEALTH_QUIET_PERIOD": "5"}, "environment variable HEALTH_QUIET_PERIOD: "},
		"cleanup without node name": {[]string{"--cleanup"}, nil, "--node-name (or NODE_NAME) is missing"},
		"cleanup without cluster":   {[]string{"--cleanup", "--node-name=a"}, nil, "--kubeconfig is not set"},
		"an address without port":   {[]string{"--node-name=a", "--listen-address=x"}, nil, "--listen-address: address x: missing port"},
		"no such kubeconfig":        {[]string{"--kubeconfig=/nowhere/at/all"}, map[string]string{"NODE_NAME": "a"}, "--kubeconfig: "},
		"no cluster":                {[]string{"--node-name=a"}, nil, "--kubeconfig is not set, and the pod's service account can't be used"},
		"a variable's bad boolean":  {nil, map[string]string{"NODE_NAME": "a", "PRINT_INVENTORY": "perhaps"}, "environment variable PRINT_INVENTORY: "},
		"a variable's bad value":    {nil, map[string]string{"NODE_NAME": "a", "MEMORY_UNIT": "TiB"}, `"TiB"`},
		"the flag wins":             {[]string{"--memory-unit=TB"}, map[string]string{"NODE_NAME": "a", "MEMORY_UNIT": "GiB"}, `"TB"`},
		"no library":                {[]string{"--print-inventory", "--nvml-library=/nowhere/libnvidia-ml.so.1"}, nil, "listing the cards: "},
		"printing checks the unit":  {[]string{"--print-inventory", "--memory-unit=x"}, nil, "--memory-unit"},
		"a short flag, no variable": {nil, map[string]string{"V": "x", "H": "x"}, "--node-name"},
		"an unknown log format":     {[]string{"--node-name=a", "--logging-format=xml"}, nil, `--logging-format, -v: format: Invalid value: "xml"`},
		"HELP sets no flag":         {nil, map[string]string{"HELP": "true", "VERSION": "true"}, "--node-name"},
		"unknown isolation":         {[]string{"--node-name=a", "--isolation=vgpu"}, nil, `--isolation: isolation mode "vgpu": want none, driver or mps`},
		"relative MPS directory":    {[]string{"--node-name=a", "--mps-pipe-directory=x"}, nil, `--mps-pipe-directory: "x" is not an absolute path`},
		"mps, a relative directory": {[]string{"mps", "--mps-pipe-directory=x"}, nil, `--mps-pipe-directory: "x" is not an absolute path`},
		"mps, no size":              {[]string{"mps"}, map[string]string{"MOUNT_SHARED_MEMORY": "much"}, "--mount-shared-memory: quantities must match"},
		"mps, a negative size":      {[]string{"mps", "--mount-shared-memory=-1Gi"}, nil, "--mount-shared-memory: must be positive, got -1Gi"},
		"mps without the library":   {[]string{"mps", "--nvml-library=/nowhere/libnvidia-ml.so.1"}, nil, "no NVIDIA driver library"},
		"relative cgroups":          {[]string{"--node-name=a", "--cgroup-root=x"}, nil, `--cgroup-root: "x" is not an absolute path`},
		"no CDI directory":          {[]string{"--node-name=a", "--cdi-directories="}, nil, "--cdi-directories: no directory"},
		"relative CDI directory":    {[]string{"--node-name=a", "--cdi-directories=/etc/cdi,x"}, nil, `--cdi-directories: ["/etc/cdi" "x"] are not all absolute paths`},
		"a simulated card's limit":  {[]string{"--node-name=a", "--simulated-cards", "--isolation=driver"}, nil, "--simulated-cards: no container gets a simulated card"},
		"a simulated card by CDI":   {[]string{"--node-name=a", "--simulated-cards", "--device-list-strategy=cdi-cri"}, nil, "--simulated-cards: no container gets a simulated card"},
		"a negative tolerance":      {[]string{"--node-name=a", "--overuse-tolerance=-1"}, nil, "--overuse-tolerance: must be a number of percent that is not negative, got -1"},
		"a tolerance of no number":  {[]string{"--node-name=a", "--overuse-tolerance=NaN"}, nil, "not negative, got NaN"},
		"an infinite tolerance":     {[]string{"--node-name=a", "--overuse-tolerance=Inf"}, nil, "not negative, got +Inf"},
		"a negative grace period":   {[]string{"--node-name=a", "--overuse-grace=-1s"}, nil, "--overuse-grace: must not be negative, got -1s"},
		"no interval":               {[]string{"--node-name=a", "--usage-interval=0s"}, nil, "--usage-interval: must be positive, got 0s"},
		"an invalid card memory":    {[]string{"--node-name=a", "--card-memory=GPU-a=much"}, nil, `--card-memory: GPU-a: size "much"`},
		"a configuration's mistake": {[]string{"--print-inventory", "--config=/nowhere/config.yaml"}, nil, "--config: open /nowhere/config.yaml: no such file"},
		"a variable's bad size":     {nil, map[string]string{"NODE_NAME": "a", "CARD_MEMORY": "0"}, "--card-memory: a size must be positive"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("KUBERNETES_SERVICE_HOST", "")
			command := newCommand(func(name string) (string, bool) { value, ok := test.environment[name]; return value, ok })
			command.SetArgs(append([]string{}, test.args...))
			command.SetOut(io.Discard)
			err := command.ExecuteContext(t.Context())
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestHelp(t *testing.T) {
	var out strings.Builder
	command := newCommand(func(string) (string, bool) { return "", false })
	command.SetArgs([]string{"-h"})
	command.SetOut(&out)
	check.Must(t, command.Execute())
	for _, flag := range []string{
		"kubeconfig", "node-name", "memory-unit", "visible-devices", "device-list-strategy", "compat-error-env", "device-plugin-dir", "pod-resources-socket",
		"nvml-library", "health-quiet-period", "card-memory", "config", "default-config", "dp-disable-healthchecks", "dp-enable-healthchecks", "listen-address", "print-inventory", "cleanup", "version", "logging-format", "authorize-metrics",
		"usage-interval", "isolation", "cgroup-root", "cdi-directories", "mps-pipe-directory", "overuse-tolerance", "overuse-grace", "usage-listen-address", "usage-metrics", "simulated-cards",
	} {
		if !strings.Contains(out.String(), "--"+flag) {
			t.Errorf("help lacks --%s", flag)
		}
	}
	programtest.CheckHelp(t, command.Flags())
}

// TestHealthCheckVariables checks the variables that manifests of NVIDIA's device plugin set.
func TestHealthCheckVariables(t *testing.T) {
	environment := map[string]string{"DP_DISABLE_HEALTHCHECKS": "48,63", "DP_ENABLE_HEALTHCHECKS": "all"}
	command := newCommand(func(name string) (string, bool) { value, ok := environment[name]; return value, ok })
	check.Must(t, command.PreRunE(command, nil))
	for flag, want := range map[string]string{"dp-disable-healthchecks": "48,63", "dp-enable-healthchecks": "all"} {
		if got, err := command.Flags().GetString(flag); got != want || err != nil {
			t.Errorf("--%s is %q, %v, want %q", flag, got, err, want)
		}
	}
}

// TestConfigPrecedence: a flag wins over its variable, that over the file, and that over the default, value by value.
func TestConfigPrecedence(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := "apiVersion: " + nodeconfig.APIVersion + "\nkind: " + nodeconfig.Kind + "\nmemoryUnit: 3GiB\nhealthChecks: {quietPeriod: 3m}\n"
	check.Must(t, os.WriteFile(file, []byte(text), 0o644))
	config := map[string]string{"CONFIG": file}
	for name, test := range map[string]struct {
		args        []string
		environment map[string]string
		unit        gpu.Unit
		quiet       time.Duration
	}{
		"the defaults":                  {nil, nil, gpu.GiB, 5 * time.Minute},
		"the file":                      {nil, config, 3 * gpu.GiB, 3 * time.Minute},
		"a variable over the file":      {nil, map[string]string{"CONFIG": file, "MEMORY_UNIT": "2GiB"}, 2 * gpu.GiB, 3 * time.Minute},
		"a flag over both":              {[]string{"--memory-unit=4GiB"}, map[string]string{"CONFIG": file, "MEMORY_UNIT": "2GiB"}, 4 * gpu.GiB, 3 * time.Minute},
		"a flag with the default value": {[]string{"--memory-unit=GiB", "--health-quiet-period=5m"}, config, gpu.GiB, 5 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			var o options
			flags := pflag.NewFlagSet("", pflag.ContinueOnError)
			o.addFlags(flags)
			check.Must(t, flags.Parse(test.args))
			err := program.SetFlags(flags, func(name string) (string, bool) { value, ok := test.environment[name]; return value, ok })
			check.Must(t, err)
			if _, err := o.configure(flags.Changed); err != nil {
				t.Fatal(err)
			}
			got, err := o.plugin.Config.Read("")
			if err != nil || got.Settings.Unit != test.unit || got.Settings.QuietPeriod != test.quiet {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}
